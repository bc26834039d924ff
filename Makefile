# make demo  sets up .venv and fine-tunes a small model on this machine.
# make test  sets up .venv and runs every check; make fix formats; make clean removes what these made.
# make test-ray   runs the end-to-end tests against servers on a Ray cluster, PostgreSQL and S3, in about half an hour.
# make chaos kills servers at work, 250 times in about half an hour, and sees that nothing is lost.
# make chaos-ray  does the same to two servers on a Ray cluster, and to the cluster, 60 times in about half an hour.
# make fuzz  sends a server over 100,000 requests that are wrong in every way, and sees that it stands.
# make load  lets 1,000 clients, 10,000 samples and 50 trainings loose on a server, and looks at what each gets.
# make soak  keeps a server busy for an hour and sees that nothing grows.
# make docs  builds the documentation as a site in build/site.
PYTHON ?= python3
BIN := .venv/bin
TRAINERS ?= 2

.PHONY: demo test test-ray check fix chaos chaos-ray fuzz load soak docs clean

demo: .venv/local
	$(BIN)/python examples/demo.py

test: check
	$(BIN)/python -m pytest --numprocesses 3 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

test-ray: .venv/ready
	$(BIN)/python -m pytest --servers=ray --trainers=$(TRAINERS) tests/end_to_end

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

chaos: .venv/ready
	$(BIN)/python -m tests.chaos --kills 200
	$(BIN)/python -m tests.chaos --kills 50 --database postgres

chaos-ray: .venv/ready
	$(BIN)/python -m tests.chaos --kills 60 --ray --trainers $(TRAINERS)

fuzz: .venv/ready build/fuzz/ready
	$(BIN)/python -m tests.fuzz
	$(BIN)/python -m tests.fuzz --postgres --inputs 20000 --real 0
	$(BIN)/python -m tests.fuzz.openapi build/fuzz/bin/schemathesis

load: .venv/ready
	$(BIN)/python -m tests.load

soak: .venv/ready
	$(BIN)/python -m tests.load.soak --minutes 60

docs: .venv/docs
	$(BIN)/zensical build --strict --clean
	@echo 'The site is build/site/index.html. To search it: $(PYTHON) -m http.server --directory build/site'

.venv/local: pyproject.toml constraints-cpu.txt
	@echo 'Installing torch and the rest into .venv, once: about 1.5 GB and a few minutes.'
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

# Apart, because schemathesis wants versions of its own of what the tests use.
build/fuzz/ready: pyproject.toml
	$(PYTHON) -m venv build/fuzz
	build/fuzz/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	build/fuzz/bin/python -m pip install --quiet --group fuzz
	touch $@

.venv/ready: .venv/local
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt --editable '.[server,postgres]' --group test
	touch $@

clean:
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
