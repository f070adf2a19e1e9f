"""The served node's protocol: Open Inference Protocol v2 over REST and gRPC, metrics, admin, drain."""
