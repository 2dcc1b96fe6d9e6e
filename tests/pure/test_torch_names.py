"""Every name of torch that the package writes down, and every keyword that it hands to a callable of torch, is there in
the torch that runs. What torch keeps private is listed here, each with the files that use it: it may go any day.
"""

import ast
import functools
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from tests.budget.source import PACKAGE, modules, nodes

PRIVATE = {
    "torch.Tensor._make_subclass": "tools/simulate/install.py",
    "torch.Tensor._make_wrapper_subclass": "sequence/tiling/logits.py",
    "torch._C": "client/zero/incoming.py sequence/tiling/logits.py tools/simulate/install.py zero/hooks.py "
    "zero/param.py",
    "torch._C.DisableTorchFunctionSubclass": "client/zero/incoming.py sequence/tiling/logits.py zero/param.py",
    "torch._C._current_graph_task_id": "zero/hooks.py",
    "torch._C._distributed_c10d.FakeWork": "tools/simulate/install.py tools/simulate/record.py",
    "torch._C._distributed_c10d.FakeWork.unbox": "tools/simulate/record.py",
    "torch._C._set_only_lift_cpu_tensors": "tools/simulate/install.py",
    "torch._C._storage_Use_Count": "zero/param.py",
    "torch._disable_dynamo": "moe/exchange.py",
    "torch._dynamo": (
        "profiling/flops_profiler/profiler.py profiling/timeline/listen.py tools/simulate/install.py "
        "tools/verify/ranks.py zero/hooks.py"
    ),
    "torch._dynamo.utils": "tools/verify/grads.py",
    "torch._foreach_add_": "optim/rules.py",
    "torch._foreach_copy_": "tools/bench/ckpt.py",
    "torch._foreach_norm": "zero/gradients.py",
    "torch._foreach_sub_": "optim/rules.py",
    "torch._subclasses": "tools/simulate/install.py",
    "torch._subclasses.fake_tensor.FakeTensor": (
        "tools/simulate/install.py tools/simulate/natives.py tools/simulate/record.py tools/simulate/stores.py"
    ),
    "torch._subclasses.fake_tensor.FakeTensor.tolist": "tools/simulate/install.py",
    "torch._subclasses.fake_tensor.FakeTensorMode": "tools/simulate/install.py tools/simulate/record.py",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "tools/simulate/record.py",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "checkpoint/foreign/unpickle.py",
    "torch._weight_norm": "zero/param.py",
    "torch._weights_only_unpickler": "checkpoint/foreign/unpickle.py",
    "torch._weights_only_unpickler._get_allowed_globals": "checkpoint/foreign/unpickle.py",
    "torch.autograd.Variable._execution_engine": "zero/hooks.py",
    "torch.autograd.Variable._execution_engine.queue_callback": "zero/hooks.py",
    "torch.autograd.profiler._is_profiler_enabled": "monitor/events.py",
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": "tools/simulate/control.py",
    "torch.distributed._tools.fake_collectives.CollectiveOp": "tools/simulate/record.py",
    "torch.distributed._tools.fake_collectives.CollectiveOp.get_process_group": "tools/simulate/record.py",
    "torch.distributed.distributed_c10d._get_default_group": "comm/mesh/groups.py",
    "torch.distributed.distributed_c10d._get_default_store": "comm/channel.py comm/mesh/groups.py",
    "torch.distributed.distributed_c10d._get_default_timeout": "comm/mesh/groups.py",
    "torch.distributed.distributed_c10d._new_process_group_helper": "comm/mesh/groups.py",
    "torch.distributed.distributed_c10d._world": "comm/collectives.py comm/hang/ledger.py comm/mesh/groups.py",
    "torch.distributed.distributed_c10d._world.pg_group_ranks": "comm/mesh/groups.py",
    "torch.distributed.distributed_c10d._world.pg_map": "comm/collectives.py comm/hang/ledger.py",
    "torch.nn.Module._call_impl": "zero/hooks.py",
    "torch.nn.Module._call_impl.__code__": "zero/hooks.py",
    "torch.nn.Module._load_from_state_dict": "client/zero/incoming.py",
    "torch.nn.modules.dropout._DropoutNd": "tensor/apply.py tools/verify/layouts/three_axes.py",
    "torch.ops.aten._scaled_dot_product_attention_math": "tools/simulate/install.py",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "tools/simulate/install.py",
    "torch.ops.aten._scaled_dot_product_flash_attention": "tools/simulate/install.py",
    "torch.optim.optimizer._global_optimizer_post_hooks": "optim/base.py",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "optim/base.py",
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "sequence/tiling/blocks.py tools/simulate/calibrate/device.py tools/simulate/record.py"
    ),
    "torch.utils._python_dispatch._disable_current_modes": "tools/simulate/control.py tools/simulate/natives.py",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "zero/param.py",
    "torch.utils._pytree": "checkpoint/save/client_files.py",
    "torch.utils._pytree.tree_leaves": "checkpoint/save/client_files.py",
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": "tools/simulate/device.py",
    "torch.utils.data._utils.signal_handling": "comm/interrupts.py",
}

# Private attributes of torch's objects, whatever the expression that they are read from.
OBJECTS: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "DTensor": DTensor,
    "Storage": torch.UntypedStorage,
    "Module": torch.nn.Module(),
    "ProcessGroup": torch.distributed.ProcessGroup,
    "OpOverload": torch.ops.aten.add.Tensor,
    "aten": torch.ops.aten,
}
PRIVATE_OF_OBJECTS = {
    "Tensor._backward_hooks": "sequence/tiling/tiles.py tools/verify/teardown.py",
    "Tensor._cdata": "tools/simulate/stores.py tools/verify/teardown.py zero/param.py",
    "Storage._checkpoint_offset": "checkpoint/foreign/weights.py",
    "ProcessGroup._device_types": "comm/mesh/groups.py",
    "ProcessGroup._get_backend": "comm/mesh/groups.py",
    "ProcessGroup._get_sequence_number_for_group": "comm/collectives.py comm/hang/ledger.py",
    "Module._load_from_state_dict": "client/zero/incoming.py",
    "Module._load_state_dict_pre_hooks": "client/zero/incoming.py",
    "aten._local_scalar_dense": "tools/simulate/record.py",
    "Module._non_persistent_buffers_set": "tensor/generation.py zero/module/state.py",
    "OpOverload._overloadpacket": "tools/simulate/record.py",
    "Tensor._post_accumulate_grad_hooks": "tools/verify/teardown.py",
    "OpOverload._schema": "sequence/tiling/blocks.py tools/simulate/record.py",
    "aten._to_copy": "tools/simulate/record.py",
    "aten._scaled_dot_product_flash_attention": "sequence/ring.py",
    "aten._scaled_dot_product_flash_attention_backward": "sequence/ring.py",
}

# Names that torch has not everywhere, and what it takes.
CONDITIONAL = {
    "torch.distributed.ProcessGroupNCCL": "a build with NCCL",
    "torch.sim": "our own device",
    "torch.utils.tensorboard": "tensorboard",
}


class Uses(NamedTuple):
    """The files of ``deepspeed/`` that have a dotted name, a private attribute that no file of the package makes, or a
    keyword for a dotted name.
    """

    names: dict[str, set[str]]
    attributes: dict[str, set[str]]
    keywords: dict[tuple[str, str], set[str]]


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _is_torch(module: str | None) -> bool:
    return (module or "").split(".")[0] == "torch"


def _imported(path: Path) -> dict[str, str]:
    """What each name that an import of a file binds stands for."""
    bound = {}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if _is_torch(alias.name)]
            bound |= {a.asname or "torch": a.name if a.asname else "torch" for a in names}
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return bound


def _dotted(node: ast.AST, bound: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join((bound[node.id], *parts)) if isinstance(node, ast.Name) and node.id in bound else None


def _modules(path: Path) -> Iterator[str]:
    """Names of modules of torch, imported or in a text."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_torch(alias.name))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            yield str(node.value)


@functools.cache
def uses() -> Uses:
    """What all files of the package use."""
    names, attributes, keywords = (defaultdict[Any, set[str]](set) for _ in range(3))
    own: set[str] = set()
    for path in modules().values():
        place, bound = path.relative_to(PACKAGE).as_posix(), _imported(path)
        for name in (*bound.values(), *_modules(path)):
            names[name].add(place)
        for node in nodes(path):
            if isinstance(node, ast.Attribute):
                if name := _dotted(node, bound):
                    names[name].add(place)
                elif isinstance(node.ctx, ast.Store):
                    own.add(node.attr)
                elif _is_private(node.attr):
                    attributes[node.attr].add(place)
            elif isinstance(node, ast.Call) and (name := _dotted(node.func, bound)):
                for keyword in filter(None, (k.arg for k in node.keywords)):
                    keywords[name, keyword].add(place)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
    return Uses(names, {name: places for name, places in attributes.items() if name not in own}, keywords)


def resolve(name: str) -> Any:
    """What a dotted name stands for in this torch; AttributeError or ModuleNotFoundError where it is nothing."""
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            if not inspect.ismodule(found):
                raise
            found = importlib.import_module(path)
    return found


def takes(function: Any, keyword: str) -> bool:
    """Whether ``function`` has the argument, as far as torch tells: in a signature, a schema, or a docstring."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        operator = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
        schemas = [str(getattr(operator, overload)._schema) for overload in operator.overloads()] if operator else []
        texts = (*schemas, function.__doc__, getattr(function.__init__, "__doc__", ""))
        return any(re.search(rf"\b{keyword}\b", text or "") for text in texts)
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _is_there(name: str) -> bool:
    try:
        resolve(name)
    except (AttributeError, ModuleNotFoundError):
        return any(name == some or name.startswith(f"{some}.") for some in CONDITIONAL)
    return True


def test_every_name_of_torch_that_is_used_exists() -> None:
    assert len(uses().names) > 200
    missing = {name: sorted(places) for name, places in uses().names.items() if not _is_there(name)}
    assert not missing, f"torch {torch.__version__} has no {missing}"


def test_every_keyword_that_is_passed_to_torch_is_taken() -> None:
    assert len(uses().keywords) > 100
    unknown = {}
    for (name, keyword), places in uses().keywords.items():
        if _is_there(name) and not takes(resolve(name), keyword):
            unknown[f"{name}({keyword}=)"] = sorted(places)
    assert not unknown, f"torch {torch.__version__} does not take {unknown}"


def test_private_names_of_torch_are_listed_with_the_files_that_use_them() -> None:
    used = {name: " ".join(sorted(places)) for name, places in uses().names.items() if _is_private(name)}
    assert used == PRIVATE


def test_private_attributes_of_torchs_objects_are_listed_and_exist() -> None:
    used = {}
    for name, places in uses().attributes.items():
        if owner := next((what for what, object in OBJECTS.items() if hasattr(object, name)), None):
            used[f"{owner}.{name}"] = " ".join(sorted(places))
    assert used == PRIVATE_OF_OBJECTS
