"""Fused operators as functions: what a rewritten forward calls.

Plain torch stands behind every function, so they differentiate, compile and run on meta tensors;
their signatures are the contract, what computes them is not. Importing this room imports torch and
nothing else. The design is in the README's architecture section.
"""

from fusekit.kernels.act_and_mul import act_and_mul
from fusekit.kernels.activations import ACTIVATIONS, activation_name
from fusekit.kernels.gated_rms_norm import GatedNormForm, gated_norm_forms, gated_rms_norm
from fusekit.kernels.norm_form import NORM_PROBES, NormForm, norm_forms
from fusekit.kernels.rms_norm import rms_norm

__all__ = [
    "ACTIVATIONS",
    "NORM_PROBES",
    "GatedNormForm",
    "NormForm",
    "act_and_mul",
    "activation_name",
    "gated_norm_forms",
    "gated_rms_norm",
    "norm_forms",
    "rms_norm",
]
