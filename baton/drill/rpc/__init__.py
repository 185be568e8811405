"""gRPC in memory: channels and servers that carry serialized messages over a simulated network.

Implements what Baton calls on a ``grpc.aio`` channel, server, call and context, with the same meaning: statuses,
trailing metadata, deadlines, cancellation at both ends, flow control per call. Knows nothing of services.
"""
