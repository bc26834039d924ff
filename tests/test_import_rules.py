"""The dependency rules of the house, and what importing the package costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tinsmith"
RAYS_OWN = ("actor", "bridge", "cluster", "member", "speaking")
SHARED = ("types", "wire", "text", "errors", "sharing")
HEAVY = ("torch", "transformers", "numpy", "httpx", "rich", "pydantic", "msgspec", "pyqwest", "google.protobuf")


def modules() -> list[Path]:
    found = sorted(SOURCE.rglob("*.py"))
    assert len(found) > 40, "the walk found too little to prove anything"
    return found


def imports(path: Path, *, only_at_import: bool = False) -> Iterator[str]:
    """The modules a file imports: anywhere in it, or only those loaded together with it."""
    for node in _walk(ast.parse(path.read_text()), only_at_import):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _walk(tree: ast.AST, only_at_import: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if only_at_import and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_type_checkers(node)):
            continue
        yield node
        yield from _walk(node, only_at_import)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def half(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_what_its_place_allows(path: Path) -> None:
    forbidden = {
        **dict.fromkeys(SHARED, ("tinsmith.client", "tinsmith.server", "tinsmith.cli")),
        "client": ("tinsmith.server", "tinsmith.cli"),
        "server": ("tinsmith.client", "tinsmith.cli"),
        "export": ("tinsmith.client", "tinsmith.server", "tinsmith.cli"),
        "recipes": ("tinsmith.server", "tinsmith.cli"),
    }.get(half(path), ())
    for module in imports(path):
        assert not any(is_under(module, package) for package in forbidden), f"{path} imports {module}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_torch_is_loaded_with_a_module_only_in_the_engine(path: Path) -> None:
    if path.is_relative_to(SOURCE / "server" / "engine"):
        return
    assert not any(is_under(module, "torch") for module in imports(path, only_at_import=True))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_configuration_of_the_client_reads_the_environment(path: Path) -> None:
    if half(path) not in ("client", "auth", "compat", "__init__", *SHARED) or path.name == "config.py":
        return
    reads = {"os.environ", "os.environb", "os.getenv"}
    used = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not used & reads, f"{path} reads the environment"


def test_the_package_loads_nothing_heavy_and_little_at_all() -> None:
    assert loaded_after("import tinsmith", HEAVY) == []
    assert int(run("import sys, tinsmith; print(len(sys.modules))")) <= 200


def test_the_clients_load_without_torch_and_its_company() -> None:
    heavy = ("torch", "transformers", "httpx", "rich", "pydantic", "tokenizers", "huggingface_hub", "jinja2")
    clients = "import tinsmith as t; t.ServiceClient, t.TrainingClient, t.SamplingClient, t.RestClient, t.AdminClient"
    assert loaded_after(clients, heavy) == []


def test_a_client_can_be_made_without_torch_and_its_company() -> None:
    made = "import tinsmith; tinsmith.ServiceClient(base_url='http://127.0.0.1:9', api_key='tml-x')"
    assert loaded_after(made, ("torch", "transformers", "httpx", "rich")) == []


def test_the_api_process_loads_neither_torch_nor_what_reads_text() -> None:
    heavy = ("torch", "transformers", "tokenizers", "huggingface_hub", "jinja2")
    assert loaded_after("import tinsmith.server.app", heavy) == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_ray_is_loaded_only_by_its_bridge_and_its_actors(path: Path) -> None:
    if path.parent == SOURCE / "server" / "on_ray" and path.stem in RAYS_OWN:
        return
    theirs = tuple(f"tinsmith.server.on_ray.{name}" for name in RAYS_OWN)
    assert not any(is_under(module, "ray") or module in theirs for module in imports(path)), f"{path} loads Ray"


def test_a_server_without_ray_loads_nothing_of_it() -> None:
    assert loaded_after("import tinsmith.server.main, tinsmith.server.worker_process", ("ray",)) == []


def test_importing_leaves_the_logging_of_others_alone() -> None:
    code = """
import logging, tinsmith
tinsmith.ServiceClient(base_url='http://127.0.0.1:9', api_key='tml-x')
root, others, ours = logging.root, logging.getLogger('httpx'), logging.getLogger('tinsmith')
print(root.handlers, root.level, others.level, ours.handlers)
"""
    assert run(code) == "[] 30 0 []"


def loaded_after(code: str, names: tuple[str, ...]) -> list[str]:
    found = run(f"import sys\n{code}\nprint(*[name for name in {names!r} if name in sys.modules])")
    return found.split()


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
