"""Weights of a transformers model, packed for the kernels, and steps run by them."""

import ctypes
import math
import mmap
from array import array
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import nn

from services.worker.model.backend import Caches, Draw, FlatStep, Logits, Unavailable
from services.worker.model.cpu.build import load_kernels

PANEL = 32  # outputs in a panel of packed weights
GROUP = 16  # positions in a group of KV
MAX_HEAD_DIM = 256
QUANT_GROUP = 64  # inner elements with scales of their own
HUGE_PAGE = 2 << 20
FORMATS = {"float32": (0, torch.float32, 1), "bfloat16": (1, torch.bfloat16, 2), "int8": (2, torch.int8, 4)}


class _Linear(Structure):
    _fields_ = [
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int64),
        ("inner", c_int64),
    ]


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
        ("keys", c_void_p),
        ("values", c_void_p),
    ]


class _Model(Structure):
    _fields_ = [
        *(
            (name, c_int64)
            for name in (
                "num_layers",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "intermediate",
                "block_size",
                "format",
                "wide",
            )
        ),
        ("norm_eps", c_float),
        ("attention_scale", c_float),
        ("layers", POINTER(_Layer)),
        *((name, c_void_p) for name in ("final_norm", "embedding", "cosines", "sines")),
        ("head", _Linear),
        ("vocabulary", c_int64),
    ]


class _Draw(Structure):
    _fields_ = [
        ("uniform", c_double),
        *((name, c_float) for name in ("sharpness", "top_p", "min_p")),
        ("top_k", c_int32),
        ("allowed", c_void_p),
    ]


class _Step(Structure):
    _fields_ = [
        ("tokens", c_void_p),
        ("rows", c_int64),
        ("spans", c_void_p),
        ("num_spans", c_int64),
        ("tables", c_void_p),
        ("wanted", c_void_p),
        ("num_wanted", c_int64),
        *((name, c_void_p) for name in ("logits", "draws", "chosen", "states")),
    ]


class CpuDecoder:
    """A Llama-shaped decoder on AVX-512. Each output is one chain of sums, so it is batch-invariant in every format.

    weights: float32, bfloat16 or int8 (W8A8, a scale per 64 inner elements on both sides; KV in bfloat16).
    Takes over the weights of `model`, which is of no use afterwards. Raises Unavailable.
    """

    batch_invariant = True
    has_own_threads = True
    draws = True
    masks = True

    def __init__(
        self,
        model: Any,
        weights: str,
        block_size: int,
        max_model_len: int,
        threads: int,
        wide: bool | None = None,
    ) -> None:
        """wide: multiply bfloat16 as floats; None does so where it is faster."""
        self._decoder: Any = None
        check(model, weights, block_size)
        self._library = _declared(load_kernels())
        self._wide = bool(self._library.orca_wide_is_faster()) if wide is None else wide
        self._threads = threads
        self._weights = weights
        self._kept: list[Any] = []  # what the structures point to
        config = model.config
        self._vocab_size = int(config.vocab_size)
        self._kv_dtype = torch.float32 if weights == "float32" else torch.bfloat16
        self.caches: Caches = []
        self._layers = (_Layer * int(config.num_hidden_layers))()
        head_dim = int(model.model.layers[0].self_attn.head_dim)
        kv_heads = int(config.num_key_value_heads)
        self._cache_shape = (kv_heads, head_dim * block_size)
        self.block_bytes = 2 * len(self._layers) * kv_heads * head_dim * block_size * self._kv_dtype.itemsize
        self._model = self._describe(model, block_size, head_dim, max_model_len)

    # -- weights

    def _describe(self, model: Any, block_size: int, head_dim: int, max_model_len: int) -> _Model:
        config = model.config
        cosines, sines = _rotary_table(model, max_model_len, head_dim)
        embedding = model.model.embed_tokens.weight.detach()
        head = self._linear([model.lm_head])
        for described, layer in zip(self._layers, model.model.layers, strict=True):
            self._fill(described, layer)
        return _Model(
            num_layers=len(self._layers),
            hidden=int(config.hidden_size),
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
            head_dim=head_dim,
            intermediate=int(config.intermediate_size),
            block_size=block_size,
            format=FORMATS[self._weights][0],
            wide=self._wide,
            norm_eps=float(config.rms_norm_eps),
            attention_scale=float(model.model.layers[0].self_attn.scaling) / math.log(2),
            layers=self._layers,
            final_norm=self._floats(model.model.norm.weight),
            embedding=self._keep(embedding.to(self._kv_dtype).contiguous()),
            cosines=self._keep(cosines),
            sines=self._keep(sines),
            head=head,
            vocabulary=self._vocab_size,
        )

    def _fill(self, described: _Layer, layer: Any) -> None:
        """One layer's weights; the module's own are dropped at once, so that memory holds one copy."""
        attention, mlp = layer.self_attn, layer.mlp
        described.attention_norm = self._floats(layer.input_layernorm.weight)
        described.mlp_norm = self._floats(layer.post_attention_layernorm.weight)
        for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            module = getattr(attention, norm, None)
            setattr(described, name, self._floats(module.weight) if module is not None else None)
        described.qkv = self._linear([attention.q_proj, attention.k_proj, attention.v_proj])
        described.output = self._linear([attention.o_proj])
        described.gate_up = self._linear([mlp.gate_proj, mlp.up_proj], interleave=True)
        described.down = self._linear([mlp.down_proj])
        for linear in (*attention.children(), *mlp.children()):
            if isinstance(linear, nn.Linear):
                linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def _linear(self, parts: list[nn.Linear], interleave: bool = False) -> _Linear:
        """Linear layers with one input as one. interleave: 16 outputs of the first, 16 of the second, and so on."""
        weight = _joined([part.weight.detach() for part in parts], interleave).float()
        bias = None
        if parts[0].bias is not None:
            bias = _joined([part.bias.detach().unsqueeze(1) for part in parts], interleave).float().squeeze(1)
        columns, inner = weight.shape
        _, dtype, step = FORMATS[self._weights]
        weight = nn.functional.pad(weight, (0, -inner % step, 0, -columns % PANEL))
        if dtype == torch.int8:
            packed = _quantised(weight)
        else:
            packed = weight.to(dtype).view(-1, PANEL, weight.shape[1] // step, step).transpose(1, 2)
        if bias is not None:
            bias = nn.functional.pad(bias, (0, -columns % PANEL))
        return _Linear(
            weights=self._keep(_in_huge_pages(packed)),
            bias=self._keep(bias),
            columns=weight.shape[0],
            inner=weight.shape[1],
        )

    def _floats(self, tensor: torch.Tensor) -> int | None:
        return self._keep(tensor.detach().float().contiguous())

    def _keep(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()

    # -- steps

    def allocate(self, num_blocks: int) -> None:
        shape = (num_blocks, *self._cache_shape)
        for layer in self._layers:
            # Not in huge pages: a layer's keys and values would lie alike in them, and a step took 15 % longer.
            keys, values = torch.zeros(shape, dtype=self._kv_dtype), torch.zeros(shape, dtype=self._kv_dtype)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            self.caches.append((keys, values))
        self._decoder = self._library.orca_decoder_new(byref(self._model), self._threads)

    def prepare(self) -> None:
        """The kernels were compiled as they were loaded."""

    def forward(self, step: FlatStep) -> Logits:
        tokens, wanted = array("i", step.tokens), array("i", step.wanted)
        spans, tables = array("i"), array("i")
        for span in step.spans:
            spans.extend((span.start, span.length, span.context, len(tables)))
            tables.extend(span.block_table)
        chosen = array("i", wanted)
        drawn = step.masks is not None or any(draw is not None and draw.temperature for draw in step.draws)
        draws = (_Draw * len(wanted))(*map(_described, step.draws if drawn else ()))
        logits = torch.empty((len(wanted), self._model.head.columns)) if None in step.draws else None
        states = torch.empty((len(wanted), self._model.hidden)) if step.states else None
        arguments = _Step(
            tokens=tokens.buffer_info()[0],
            rows=len(tokens),
            spans=spans.buffer_info()[0],
            num_spans=len(step.spans),
            tables=tables.buffer_info()[0],
            wanted=wanted.buffer_info()[0],
            num_wanted=len(wanted),
            logits=None if logits is None else logits.data_ptr(),
            draws=ctypes.addressof(draws) if drawn else None,
            chosen=chosen.buffer_info()[0],
            states=None if states is None else states.data_ptr(),
        )
        # These run without the interpreter's lock.
        if step.masks is None:
            self._library.orca_decoder_step(self._decoder, byref(arguments))
        else:
            self._library.orca_decoder_begin(self._decoder, byref(arguments))
            masks = step.masks()  # made meanwhile; kept until they have been read
            for row, words in masks.items():
                draws[row].allowed = words.ctypes.data
            self._library.orca_decoder_choose(self._decoder, byref(arguments))
        return Logits(chosen.tolist(), None if logits is None else logits[:, : self._vocab_size], states)

    def products(self, rows: int, wanted: int) -> None:
        """Only the matrix products of such a step, on nothing in particular: what a step's time is measured against."""
        self._library.orca_decoder_products(self._decoder, rows, wanted)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._decoder is not None:
            self._library.orca_decoder_delete(self._decoder)
            self._decoder = None


def _described(draw: Draw | None) -> _Draw:
    if draw is None or not draw.temperature:
        return _Draw()
    return _Draw(draw.uniform, 1 / draw.temperature, draw.top_p, draw.min_p, draw.top_k)


def check(model: Any, weights: str, block_size: int) -> None:
    """Raises Unavailable if the kernels cannot run this model as it is."""
    if weights != "float32" and not torch.cpu._is_avx512_bf16_supported():
        raise Unavailable("this CPU does not multiply bfloat16")
    if weights == "int8" and not torch.cpu._is_vnni_supported():
        raise Unavailable("this CPU does not multiply int8 (VNNI)")
    config, attention = model.config, model.model.layers[0].self_attn
    inner = QUANT_GROUP if weights == "int8" else GROUP
    problems = {
        f"block size {block_size} is no multiple of {GROUP}": block_size % GROUP,
        f"activation {config.hidden_act} is not silu": config.hidden_act != "silu",
        f"head size {attention.head_dim}": attention.head_dim % PANEL or attention.head_dim > MAX_HEAD_DIM,
        f"hidden size {config.hidden_size}": config.hidden_size % max(PANEL, inner),
        f"{config.num_attention_heads} heads of {attention.head_dim}": (
            config.num_attention_heads * attention.head_dim % max(PANEL, inner)
        ),
        f"MLP size {config.intermediate_size}": config.intermediate_size % inner,
    }
    for problem, holds in problems.items():
        if holds:
            raise Unavailable(problem)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.orca_decoder_new.argtypes = [POINTER(_Model), ctypes.c_int]
    library.orca_decoder_new.restype = c_void_p
    for name in ("step", "begin", "choose"):
        getattr(library, f"orca_decoder_{name}").argtypes = [c_void_p, POINTER(_Step)]
    library.orca_decoder_products.argtypes = [c_void_p, ctypes.c_long, ctypes.c_long]
    library.orca_decoder_delete.argtypes = [c_void_p]
    return library


def _joined(parts: list[torch.Tensor], interleave: bool) -> torch.Tensor:
    """[outputs, inner] of all parts."""
    if not interleave:
        return torch.cat(parts)
    grouped = [part.view(-1, GROUP, part.shape[1]) for part in parts]
    return torch.stack(grouped, dim=1).flatten(0, 2)


def _quantised(weight: torch.Tensor) -> torch.Tensor:
    """[panels, groups, bytes]: each group of 64 inner elements with its sums and scales, as linear.h reads it."""
    columns, inner = weight.shape
    grouped = weight.view(columns // PANEL, PANEL, inner // QUANT_GROUP, QUANT_GROUP).transpose(1, 2)
    scale = (grouped.abs().amax(dim=-1, keepdim=True) / 127).to(torch.bfloat16)
    values = torch.round(grouped / scale.float().clamp(min=1e-30)).clamp(-127, 127)
    words = values.to(torch.int8).view(*values.shape[:3], QUANT_GROUP // 4, 4).transpose(2, 3)
    parts = [(-values.sum(dim=-1)).to(torch.int16), scale.squeeze(-1), words.contiguous()]
    return torch.cat([part.view(torch.uint8).flatten(2) for part in parts], dim=-1)


def _in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy where reading it through takes few address translations."""
    size = tensor.numel() * tensor.element_size()
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory, the default, has no huge pages
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
    return copy.copy_(tensor)


def _rotary_table(model: Any, positions: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [positions, head_dim / 2], from the model's own module, so that every kind of it is right.
    Raises Unavailable if only a part of a head is rotated."""
    probe = torch.zeros(1, dtype=torch.float32)
    cosines, sines = model.model.rotary_emb(probe, torch.arange(positions).unsqueeze(0))
    if cosines.shape[-1] != head_dim:
        raise Unavailable("only a part of each head is rotated")
    half = head_dim // 2
    return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()
