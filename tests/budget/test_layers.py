"""Arrows point one way: imports go down the layers, and each outside interface has one home."""

import ast
import functools
import re

from deepspeed.accelerator.native import compiler
from deepspeed.tools.report import probes
from tests.budget.source import PACKAGE, imports, modules, nodes, tree


def _layers() -> dict[str, int]:
    """Read the table in CONTRIBUTING.md; the package itself may import all."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (\d) \| (.+?) \|", text, re.MULTILINE)
    names = {name: int(number) for number, names in rows for name in re.findall(r"`([\w.]+)`", names)}
    return {"deepspeed": 9, **{f"deepspeed.{name}": number for name, number in names.items()}}


LAYERS = _layers()
REEXPORTS = tuple(module for module, number in LAYERS.items() if number == 8)
DISTRIBUTED_HOMES = (
    "deepspeed.client",
    "deepspeed.comm",
    "deepspeed.launcher",
    "deepspeed.tools",
    "deepspeed.pipe.torch_pipelining",
)

# Identifiers with the word that clients call by name.
STAGE_NAMES = {
    # states that are staged on the device for their update (Deep Optimizer States)
    "staged",
    "StagedSettings",
    "StagedUpdate",
    "zero_optimization_stage",
    "zero_stage",
    "ZERO_STAGE",
    "DeepSpeedZeroOptimizer_Stage3",
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "num_stages",
    "estimate_zero_stage",
}


def _inside(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def layer(module: str) -> int:
    """Layer of ``module`` by its longest prefix; the package itself covers only its own __init__."""
    prefixes = [p for p in LAYERS if _inside(module, p) and (p != "deepspeed" or module == "deepspeed")]
    assert prefixes, f"{module} has no layer; add it to the table in CONTRIBUTING.md"
    return LAYERS[max(prefixes, key=len)]


def _ours(module: str) -> set[str]:
    return {name for name in imports(module) if name in modules()}


def test_imports_point_down() -> None:
    assert not LAYERS.keys() - modules().keys(), "CONTRIBUTING.md names a module that is not there"
    pairs = {(module, name) for module in modules() for name in _ours(module)}
    assert not {(module, name) for module, name in pairs if layer(name) > layer(module)}


def test_the_runtime_imports_no_tool() -> None:
    tools = {module for module in modules() if _inside(module, "deepspeed.tools")}
    assert not {module for module in modules().keys() - tools if _ours(module) & tools}


def test_no_cycles() -> None:
    graph = {module: _ours(module) - {module} for module in modules()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for name in sorted(graph[module]):
                # a package that lists its own submodules is not a cycle
                if not (_inside(module, name) and modules()[name].name == "__init__.py"):
                    visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_star_imports() -> None:
    starred = [
        name
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    assert not starred


def _dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


@functools.cache
def _used(module: str) -> set[str]:
    attributes = {_dotted(node) for node in nodes(modules()[module]) if isinstance(node, ast.Attribute)}
    return attributes | imports(module)


def _names(module: str, prefix: str) -> bool:
    return any(_inside(name, prefix) for name in _used(module))


def test_only_the_device_layer_names_an_accelerator() -> None:
    homes = {module for module in modules() if _names(module, "torch.cuda")}
    assert homes <= {"deepspeed.accelerator.device"}


def test_torch_distributed_has_its_homes() -> None:
    users = {module for module in modules() if _names(module, "torch.distributed")}
    assert not {user for user in users if not any(_inside(user, home) for home in DISTRIBUTED_HOMES)}


def _is_reexport(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)] == ["__all__"]
    if isinstance(node, ast.If):  # a program that its users start with python -m
        return ast.unparse(node) == "if __name__ == '__main__':\n    sys.exit(main())"
    is_docstring = (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return is_docstring or isinstance(node, ast.Import | ast.ImportFrom)


def test_reexport_folders_contain_only_imports() -> None:
    folders = {module for module in modules() if any(_inside(module, root) for root in REEXPORTS)}
    assert not {module for module in folders if not all(map(_is_reexport, tree(modules()[module]).body))}


def _identifiers(node: ast.AST) -> set[str]:
    found = {getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname")}
    return {name for name in found if isinstance(name, str)}


def test_the_table_is_the_only_reader_of_the_word() -> None:
    # the verifier names the configurations that it compares, and never branches on one; a pipeline has other stages
    pipes = ("deepspeed.pipe", "deepspeed.tools.simulate.pipeline")
    free = ("deepspeed.zero.plan", "deepspeed.config", "deepspeed.tools.verify", *pipes, *REEXPORTS)
    found = {
        f"{module}: {name}"
        for module, path in modules().items()
        if not any(_inside(module, home) for home in free)
        for node in nodes(path)
        for name in _identifiers(node)
        if "stage" in name.lower() and name not in STAGE_NAMES
    }
    assert not found


def test_every_requirement_is_used_by_the_package() -> None:
    imported = {name.partition(".")[0] for module in modules() for name in imports(module)}
    programs = {"ninja"} if callable(compiler.find_ninja) else set()
    imports_of = {"py-cpuinfo": "cpuinfo"}
    assert not {name for name in probes.REQUIRED if imports_of.get(name, name) not in imported | programs}


def test_nothing_prints() -> None:
    printing = [
        str(path.relative_to(PACKAGE))
        for path in modules().values()
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not printing
