"""The spread of the demo's result over seeds: a measurement, not a test. It takes 7 to 12 minutes for each seed.

python tests/bench_seeds.py [--run-dir runs/demo] [--seeds 43 44] [--runs exp_mux exp]

Fine-tunes with mixing (`exp_mux`) and without (`exp`) on the data of a finished demo, with everything but the seed
unchanged, scores what it made, and writes these rows and the demo's own to `zipformer_recipes/texts/seeds.json`, which
the evaluation chapter shows. A run that is finished is not run again.
"""

import argparse
from pathlib import Path

from zipformer_recipes import evaluate, finetune
from zipformer_recipes.core import RunConfig, load_json, read_report, save_json

OUT = Path(__file__).resolve().parents[1] / "zipformer_recipes" / "texts" / "seeds.json"


def row_of(run_dir: Path) -> dict:
    "Seed, word error rates in percent and minutes of training of a finished run."
    runs, wer = read_report(run_dir, "finetune")["runs"], read_report(run_dir, "evaluate")["wer"]
    one = next(iter(runs.values()))
    return {
        "seed": one["seed"],
        "epochs": one["epochs"],
        "minutes": {name: round(r["train_seconds"] / 60, 1) for name, r in runs.items()},
        "wer": {model: {name: round(r["wer"], 2) for name, r in sets.items()} for model, sets in wer.items()},
    }


def run_seed(demo: Path, seed: int, runs: list[str]) -> Path:
    "Fine-tune and score with another seed; the run folder."
    config = load_json(demo / "run.json")["config"]
    run_dir = demo.with_name(f"{demo.name}-seed-{seed}").resolve()
    cfg = RunConfig(**config).replace(seed=seed, run_dir=str(run_dir), manifest_dir=str(demo / "data"), exp_dir="")
    cfg = cfg.replace(bpe_model=str(demo / "data" / "bpe.model"), use_mux=False)
    todo = [name for name in runs if not (run_dir / name / "result.json").exists()]
    for name in todo:
        finetune.run(cfg.replace(use_mux=name == "exp_mux", exp_dir=str(run_dir / name)))
    if todo or not (run_dir / "evaluate.json").exists():
        evaluate.run(cfg)
    return run_dir


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[43, 44])
    parser.add_argument("--runs", nargs="*", default=["exp_mux", "exp"], choices=["exp_mux", "exp"])
    args = parser.parse_args()
    demo = args.run_dir.resolve()
    rows = [row_of(demo)]
    for seed in args.seeds:
        rows.append(row_of(run_seed(demo, seed, args.runs)))
        save_json(OUT, rows)
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
