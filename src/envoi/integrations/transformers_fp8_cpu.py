"""FP8 and FP4 experts of transformers' FP8Experts on machines without a GPU, loaded as the checkpoint stores them.

transformers widens such a checkpoint to bf16 there, since its FP8 code needs a GPU. Where one of Envoi's names is
chosen and the checkpoint has nothing but experts in FP8 or FP4, it is loaded as on a GPU. Checkpoints that also have
linear layers in FP8 are still widened: transformers has no code that runs those on a CPU.
"""

import functools
from typing import Any

import torch
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from envoi.integrations.transformers import FORMAT_OF, is_experts
from envoi.integrations.transformers_checks import loads_as
from envoi.integrations.transformers_mxfp4 import noting_the_wish

FORMATS = tuple(FORMAT_OF.values())  # one that doesn't hold the stored numbers is refused, as it is on a GPU


def install() -> None:
    """Wrap two methods of transformers' FP8 quantiser; later calls do nothing."""
    kind = FineGrainedFP8HfQuantizer
    if hasattr(kind._process_model_before_weight_loading, "envoi"):
        return
    kind.validate_environment = noting_the_wish(kind.validate_environment)
    kind._process_model_before_weight_loading = _keeping_experts(kind._process_model_before_weight_loading)


def _keeping_experts(original: Any) -> Any:
    @functools.wraps(original)
    def _process_model_before_weight_loading(self, model, *args, **kwargs):
        original(self, model, *args, **kwargs)
        widened = self.quantization_config.dequantize and getattr(self, "envoi_may_load", False)
        if not (widened and loads_as(model, FORMATS) and only_experts(model, self.modules_to_not_convert)):
            return
        self.quantization_config.dequantize = False
        original(self, model, *args, **kwargs)
        quantised: list[Any] = [module for module in model.modules() if isinstance(module, FP8Experts)]
        for module in quantised:
            module.envoi_alone = True  # transformers' own code for it needs a GPU

    _process_model_before_weight_loading.envoi = True  # pyright: ignore[reportAttributeAccessIssue]
    return _process_model_before_weight_loading


def only_experts(model: torch.nn.Module, left_out: list[str] | None) -> bool:
    """Return True if a checkpoint that leaves these modules as they are has experts in FP8 or FP4 and nothing else."""
    chosen = [module for path, module in model.named_modules() if should_convert_module(path, left_out)]
    return any(map(is_experts, chosen)) and not any(isinstance(module, torch.nn.Linear) for module in chosen)
