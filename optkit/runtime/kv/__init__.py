"""KV blocks: ownership, prefix cache, offload, pools."""
