"""Plain-torch functions under the names SGLang's CPU code looks up in sgl_kernel.

Only what a Qwen3-MoE / Qwen3-Next / Qwen3.5-MoE text model needs on a CPU without
AMX is here.  Recurrent-state layout is private to these functions (both the prefill
and the decode one use it), all arithmetic is float32.  Releases differ in what they
call and where it lives: what a release has decides, not its number.
"""

import functools
import importlib
import os

import stubs
import torch
import torch.nn.functional as F


# ---- norms, gates -----------------------------------------------------------
def _rms(x, eps):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def fused_rmsnorm_gated_cpu(x, weight, z, eps):
    return (_rms(x, eps) * weight.float() * F.silu(z.float())).to(x.dtype)


def fused_sigmoid_mul_cpu(x, gate, inplace=True):
    # Some releases go on with what comes back, others with x.
    assert inplace
    return x.mul_(torch.sigmoid(gate.float()).to(x.dtype).reshape(x.shape))


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    def one(t, w):
        t = t.reshape(-1, head_dim)
        return (_rms(t, eps) * (1.0 + w.float())).to(t.dtype)

    return one(q, q_weight), one(k, k_weight)


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, heads):
    pair = q_gate.reshape(q_gate.shape[0], heads, 2 * head_dim)
    q, gate = pair[..., :head_dim], pair[..., head_dim:]
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.contiguous()


# ---- MoE router -------------------------------------------------------------
def topk_softmax_cpu(hidden_states=None, gating_output=None, topk=1, renormalize=True, correction_bias=None):
    p = torch.softmax(gating_output.float(), dim=-1)
    score = p if correction_bias is None else p + correction_bias
    ids = torch.topk(score, topk, dim=-1).indices
    w = p.gather(1, ids)
    if renormalize:
        w = w / w.sum(-1, keepdim=True)
    return w, ids.to(torch.int32)


# ---- gated delta net --------------------------------------------------------
def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g.unsqueeze(0), torch.sigmoid(b.float()).unsqueeze(0)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, nk, nv, hk, hv):
    qkv, z = qkvz.split([2 * nk * hk + nv * hv, nv * hv], dim=-1)
    b, a = ba.split([nv, nv], dim=-1)
    return qkv.contiguous(), z.reshape(-1, nv, hv).contiguous(), b.contiguous(), a.contiguous()


def _act(x, activation):
    return F.silu(x) if activation in ("silu", "swish", True) else x


def causal_conv1d_fn_cpu(
    x,
    weight,
    bias,
    activation=None,
    conv_states=None,
    has_initial_state=None,
    cache_indices=None,
    query_start_loc=None,
    seq_lens_cpu=None,
    **_,
):
    # x: [dim, tokens]; conv_states: [slots, dim, width - 1]
    dim, width = weight.shape
    out, start = torch.empty_like(x), 0
    for i, n in enumerate(int(n) for n in seq_lens_cpu):
        slot = int(cache_indices[i])
        seq = x[:, start : start + n].float()
        past = torch.zeros(dim, width - 1)
        if slot >= 0 and bool(has_initial_state[i]):
            past = conv_states[slot].float()
        full = torch.cat([past, seq], dim=1)
        y = F.conv1d(full[None], weight.float()[:, None], None if bias is None else bias.float(), groups=dim)[0]
        out[:, start : start + n] = _act(y, activation).to(x.dtype)
        if slot >= 0:
            conv_states[slot] = full[:, -(width - 1) :].to(conv_states.dtype)
        start += n
    return out


def causal_conv1d_update_cpu(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, **_):
    # x: [batch, dim]
    keep = conv_state_indices >= 0
    idx = conv_state_indices.clamp(min=0).long()
    full = torch.cat([conv_state[idx].float(), x.float().unsqueeze(-1)], dim=-1)
    y = (full * weight.float()).sum(-1)
    if bias is not None:
        y = y + bias.float()
    conv_state[idx[keep]] = full[keep][..., 1:].to(conv_state.dtype)
    return _act(y, activation).to(x.dtype)


def _expand(q, k, heads_v):
    r = heads_v // q.shape[-2]
    q, k = (F.normalize(t.float(), dim=-1, eps=1e-6) for t in (q, k))
    q = q * q.shape[-1] ** -0.5
    return q.repeat_interleave(r, dim=-2), k.repeat_interleave(r, dim=-2)


def chunk_gated_delta_rule_cpu(q, k, v, g, beta, initial_state=None, initial_state_indices=None, cu_seqlens=None, **_):
    # q, k: [1, T, Hk, D]; v: [1, T, Hv, Dv]; g, beta: [1, T, Hv]; state: [slots, Hv, D, Dv]
    # Older releases hand over one state a sequence, and store what comes back themselves.
    stored = initial_state_indices is not None
    qf, kf = _expand(q[0], k[0], v.shape[2])
    vf, decay, bt = v[0].float(), g[0].float().exp(), beta[0].float()
    out = torch.empty_like(vf)
    bounds = [int(t) for t in cu_seqlens]
    for i in range(len(bounds) - 1):
        slot = int(initial_state_indices[i]) if stored else i
        s = initial_state[max(slot, 0)].float().clone()
        for t in range(bounds[i], bounds[i + 1]):
            s = s * decay[t][:, None, None]
            err = (vf[t] - torch.einsum("hkv,hk->hv", s, kf[t])) * bt[t][:, None]
            s = s + kf[t][:, :, None] * err[:, None, :]
            out[t] = torch.einsum("hkv,hk->hv", s, qf[t])
        if slot >= 0:
            initial_state[slot] = s.to(initial_state.dtype)
    return out.unsqueeze(0).to(v.dtype), None if stored else initial_state, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *, A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, disable_state_update=False, **_
):
    # one token a sequence: q, k: [1, B, Hk, D]; v: [1, B, Hv, Dv]
    qf, kf = _expand(q[0], k[0], v.shape[2])
    g, bt = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    n = v.shape[1]
    idx = initial_state_indices[:n].clamp(min=0).long()
    keep = initial_state_indices[:n] >= 0
    s = initial_state_source[idx].float() * g[0].reshape(n, -1).exp()[..., None, None]
    err = (v[0].float() - torch.einsum("bhkv,bhk->bhv", s, kf)) * bt[0].reshape(n, -1)[..., None]
    s = s + kf[..., None] * err[..., None, :]
    out = torch.einsum("bhkv,bhk->bhv", s, qf)
    if not disable_state_update:
        initial_state_source[idx[keep]] = s[keep].to(initial_state_source.dtype)
    return out.unsqueeze(0).to(v.dtype)


def shared_expert_gate(hidden, gate_weight, shared, output, *, do_add):
    gated = torch.sigmoid(hidden.float() @ gate_weight.float()).unsqueeze(-1) * shared.float()
    output.copy_(gated + output.float() if do_add else gated)


OPS = [
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_mul_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    topk_softmax_cpu,
    fused_gdn_gating_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
]


def install():
    # PyPI's torchvision beside a CPU build of torch: name the two ops its import needs. Beside a CUDA build it names them itself.
    lib = torch.library.Library("torchvision", "DEF")
    for op in () if torch.version.cuda else ("nms", "qnms"):
        lib.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    install.lib = lib
    finder = stubs.install(["sgl_kernel"], ["sgl_kernel.scalar_type"])
    finder.fill["sgl_kernel.mamba"] = {
        "causal_conv1d_fn_cpu": causal_conv1d_fn_cpu,
        "causal_conv1d_update_cpu": causal_conv1d_update_cpu,
        "chunk_gated_delta_rule_cpu": chunk_gated_delta_rule_cpu,
    }
    for fn in OPS:
        setattr(torch.ops.sgl_kernel, fn.__name__, fn)
    torch.set_num_threads(int(os.environ.get("LAB_THREADS", "1")))
    host_memory()
    # Gated norms: take the CPU branch (SGLang takes it only where AMX is there).
    for folder in ("sglang.kernels.ops.attention.fla", "sglang.srt.layers.attention.fla"):
        for name in ("fused_norm_gate", "layernorm_gated"):
            module = optional(f"{folder}.{name}")
            if module is not None:
                module._use_cpu = True
    # Shared-expert gate: one Triton launcher stands behind both entry points, or there is one entry point, or plain torch.
    elementwise = optional("sglang.kernels.ops.elementwise.elementwise")
    if hasattr(elementwise, "_launch_fused_gate_sigmoid_mul"):
        elementwise._launch_fused_gate_sigmoid_mul = shared_expert_gate
    elif elementwise is not None:
        elementwise.fused_gate_sigmoid_mul_add = functools.partial(shared_expert_gate, do_add=True)


def optional(name):
    """A module of SGLang; None where this release has none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return None


def host_memory():
    """Host buffers: nothing to pin on this machine."""

    def plain(dims, dtype, device, pin_memory=False, allocator=None, **_):
        return torch.empty(dims, dtype=dtype, device=device)

    pools = optional("sglang.srt.mem_cache.pool_host.common") or optional("sglang.srt.mem_cache.memory_pool_host")
    pools.ALLOC_MEMORY_FUNCS["cpu"] = plain
    if not hasattr(optional("sglang.srt.state_capturer.base"), "ALLOC_MEMORY_FUNCS"):
        # Older releases pin without asking whether that can be done.
        for factory in ("empty", "zeros", "tensor"):
            setattr(torch, factory, unpinned(getattr(torch, factory)))
        # Their pools wait for a GPU before they copy a retracted request's rows.
        torch.cuda.synchronize = lambda device=None: None


def unpinned(factory):
    @functools.wraps(factory)
    def made(*args, pin_memory=False, **named):
        return factory(*args, **named)

    return made
