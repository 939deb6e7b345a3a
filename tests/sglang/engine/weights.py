"""LAB_DUMMY_SCALE=0.15 makes `--load-format dummy` weights large enough to matter.

SGLang draws every dummy parameter from +-1e-3 with a fixed seed: every token then
gives nearly the same logits.  Wider weights make the output depend on the whole
prefix, so a wrong KV or state transfer shows.  Same seed, so engines agree.
"""

import os


def install():
    scale = float(os.environ.get("LAB_DUMMY_SCALE", "0"))
    if not scale:
        return
    from sglang.srt.model_loader import loader, weight_utils

    base = weight_utils.initialize_dummy_weights

    def wide(model, *_, **__):
        base(model, -scale, scale)
        import torch

        for i, (_name, p) in enumerate(sorted(model.state_dict().items())):
            # one seed for all makes same-shaped parameters equal: shuffle each
            if torch.is_floating_point(p) and p.dim() > 1:
                g = torch.Generator(device="cpu").manual_seed(i)
                flat = p.data.reshape(-1)
                p.data.copy_(flat[torch.randperm(flat.numel(), generator=g).to(p.device)].reshape(p.shape))

    weight_utils.initialize_dummy_weights = wide
    for mod in (loader,):
        if hasattr(mod, "initialize_dummy_weights"):
            mod.initialize_dummy_weights = wide
