"""The vLLM engine: servers of its own or the user's, asked over HTTP. vLLM itself is never imported here."""
