"""What every trainer shares: how a run starts, stands, saves, fails and ends."""
