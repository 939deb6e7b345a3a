"""Let SGLang's NIXL connector move host memory.

SGLang labels its KV and state pools "VRAM" whatever device they are on.  On a CPU
engine they are ordinary memory, so name them "DRAM" before NIXL sees them.
"""

import os


def install():
    try:
        import nixl._api as api
    except ImportError:
        return
    base = api.nixl_agent
    config = api.nixlBind.nixlAgentConfig
    delay_us = int(os.environ.get("LAB_NIXL_DELAY_US", "1000"))

    class CalmConfig(config):  # the progress thread spins on a core otherwise
        def __setattr__(self, name, value):
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    api.nixlBind.nixlAgentConfig = CalmConfig

    def fix(kind):
        return "DRAM" if kind == "VRAM" else kind

    class HostAgent(base):
        def register_memory(self, reg_list, mem_type=None, *a, **k):
            return super().register_memory(reg_list, fix(mem_type), *a, **k)

        def get_reg_descs(self, descs, mem_type=None, *a, **k):
            return super().get_reg_descs(descs, fix(mem_type), *a, **k)

        def get_xfer_descs(self, descs, mem_type=None, *a, **k):
            return super().get_xfer_descs(descs, fix(mem_type), *a, **k)

        def prep_xfer_dlist(self, agent_name, xfer_list, mem_type=None, *a, **k):
            return super().prep_xfer_dlist(agent_name, xfer_list, fix(mem_type), *a, **k)

    api.nixl_agent = HostAgent
