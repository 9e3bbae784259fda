"""What a worker does with a plan, without device, network or clock."""
