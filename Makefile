# make demo  sets up .venv and fine-tunes a small model on this machine.
# make test  sets up .venv and runs every check; make fix formats; make clean removes what these made.
# make docs  builds the documentation as a site in build/site.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check fix docs clean

demo: .venv/local
	$(BIN)/python examples/demo.py

test: check
	$(BIN)/python -m pytest

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/docs
	$(BIN)/zensical build --strict --clean
	@echo 'The site is build/site/index.html. To search it: $(PYTHON) -m http.server --directory build/site'

.venv/local: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt --editable '.[local]'
	touch $@

# Apart, because the site needs neither the package nor torch.
.venv/docs: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group docs
	touch $@

.venv/ready: .venv/local
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt --editable '.[server,postgres]' --group test
	touch $@

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
