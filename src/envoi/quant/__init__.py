"""Quantisation: formats, scale layouts, casts and weight packing."""

from envoi.quant.cast import dequantize, quantize
from envoi.quant.formats import FORMATS, SCHEMES, Format, Scheme, format_named, scheme_named

__all__ = ["FORMATS", "SCHEMES", "Format", "Scheme", "dequantize", "format_named", "quantize", "scheme_named"]
