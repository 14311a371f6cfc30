# make demo   from nothing to a fine-tuned, scored model      make test   all tests
# make docs   the site, in build/docs/html                    make export notebooks -> modules
# make lab    JupyterLab on the notebooks                     make clean  remove what was built (runs/ stays)
# make pretrained   remake the shipped model from nothing (long, in the foreground, continues after a stop)
PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test docs export lab pretrained clean

demo: .venv/.ready
	$(BIN)/zipformer-recipes book run --profile demo --run-dir runs/demo

test: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q tests

docs: .venv/.ready
	$(BIN)/sphinx-build -W --keep-going -q -d build/docs/doctrees nbs build/docs/html
	@echo "the site: build/docs/html/index.html"

export: .venv/.ready
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean

lab: .venv/.ready
	$(BIN)/jupyter lab --notebook-dir=nbs

pretrained: .venv/.ready
	$(BIN)/zipformer-recipes pretrain

clean:
	rm -rf build .venv .pytest_cache .ruff_cache *.egg-info zipformer_recipes/__pycache__ tests/__pycache__

.venv/.ready: settings.ini setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "Python 3.11 or 3.12 is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "python3-venv is needed: sudo apt-get install -y python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing the pinned packages into .venv (about 6 GB with torch; some minutes)"
	$(PIP) install -c constraints.txt -e '.[dev,docs]'
	touch $@
