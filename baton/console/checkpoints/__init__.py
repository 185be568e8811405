"""Commands about checkpoints: quantizing one, and measuring the loss that a way of serving it causes."""
