"""gRPC in memory: channels and servers that carry serialized messages over a simulated network.

What the product calls on a ``grpc.aio`` channel, server, call and context is here, with the meaning that it has
there: statuses, trailing metadata, deadlines, cancellation at both ends, flow control per call. Knows nothing of
services.
"""
