"""Baton: a disaggregated prefill/decode serving cluster for large language models."""

import os

# gRPC reads this as it is imported. With its fork handlers on, the child between fork and exec starts gRPC's
# poller anew, and dies of it when subprocess closes the descriptors. Our children always exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
