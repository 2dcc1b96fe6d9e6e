"""ZeRO: the public helpers of ``deepspeed.zero``, loaded at their first use; the machinery lives in the submodules."""

from typing import Any

from deepspeed.client.attrs import loads_names

_GATHERED = ("GatheredParameters", "register_external_parameter", "unregister_external_parameter")
_PLACES: dict[str, Any] = {
    "Init": "deepspeed.client.zero.init",
    "TiledLinear": "deepspeed.client.zero.tiled",
    "TiledLinearReturnBias": "deepspeed.client.zero.tiled",
    "ZeroParamStatus": "deepspeed.zero.param",
    "ZeroParamType": "deepspeed.zero.module.attributes",
    **dict.fromkeys((*_GATHERED, "unwrap_model_for_generation"), "deepspeed.client.zero.gathered"),
}
__all__ = [*_PLACES]
__getattr__ = loads_names(__name__, lambda: _PLACES)
