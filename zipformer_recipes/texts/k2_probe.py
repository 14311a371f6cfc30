"""What the k2 of this interpreter is and can do, step by step, as JSON in the file named by the second argument.

Runs alone under any Python from 3.6 on, without this package: `python k2_probe.py k2 facts.json`. What k2 was built
for is read before it is imported, so it is known of a k2 that does not import, too. The loss of each device is k2's
simple transducer loss of fixed numbers; the caller compares it with its own.
"""

import glob
import importlib.util
import json
import os
import platform
import re
import sys

facts = {}


def tell(**more):
    "Add facts and write all of them, whole or not at all."
    facts.update(more)
    with open(sys.argv[2] + ".part", "w") as f:
        json.dump(facts, f)
    os.replace(sys.argv[2] + ".part", sys.argv[2])


def written(folder):
    "What k2 was built for, from its files alone: the record of torch and CUDA, and the name of its extension."
    record, build = os.path.join(folder, "torch_version.py"), {}
    if os.path.exists(record):
        with open(record) as f:
            said = dict(re.findall(r'(?m)^k2_torch_(\w+)\s*=\s*"(.*)"', f.read()))
        build = {"torch": said.get("version") or None, "cuda": said.get("cuda_version") or None}
    for file in glob.glob(os.path.join(os.path.dirname(folder), "_k2*.so")):
        tag = re.search(r"cpython-(\d)(\d+)", file)
        build.update({"python": ".".join(tag.groups())} if tag else {})
    return build


def told(k2):
    "The same from the extension itself, with its version and the architectures it has code for."
    import _k2

    own = getattr(_k2, "version", None)
    codes = re.findall(r"code=\[?([\w,]+)", getattr(own, "cmake_cuda_flags", "") or "")
    return {
        "version": getattr(own, "__version__", None) or getattr(k2, "__version__", None),
        "torch": getattr(own, "torch_version", None),
        "cuda": getattr(own, "torch_cuda_version", None) or getattr(own, "cuda_version", None),
        "python": getattr(own, "python_version", None),
        "with_cuda": bool(getattr(own, "with_cuda", getattr(k2, "with_cuda", False))),
        "archs": sorted({code for group in codes for code in group.split(",") if code}),
    }


def numbers(torch, *shape):
    "Fixed numbers between -1 and 1."
    count = 1
    for n in shape:
        count *= n
    return torch.sin(torch.arange(count, dtype=torch.float32) * 1.7).reshape(shape)


def loss_on(k2, torch, device):
    "The loss, or the error as text."
    try:
        am, lm = numbers(torch, 1, 5, 4).to(device), numbers(torch, 1, 3, 4).to(device)
        symbols = torch.tensor([[1, 2]], device=device)
        return float(k2.rnnt_loss_simple(lm=lm, am=am, symbols=symbols, termination_symbol=0, reduction="sum"))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def main(file):
    tell(python=platform.python_version(), file=file, build=written(os.path.dirname(file)))
    import torch

    tell(torch=str(torch.__version__), torch_cuda=torch.version.cuda)
    import k2

    build = {**facts["build"], **{name: value for name, value in told(k2).items() if value is not None}}
    tell(version=build.get("version"), build=build)
    losses = {}
    for device in ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]:
        losses[device] = loss_on(k2, torch, device)
        tell(losses=losses)


found = importlib.util.find_spec("k2")
if found is None or found.origin is None:  # a bare folder named k2 is no package
    tell(missing=True)
else:
    main(found.origin)
