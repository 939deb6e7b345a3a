"""Real SGLang engines on a CPU, through r3router (`make test-sglang`)."""
