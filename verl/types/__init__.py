"""What the parts say to each other, one file each: requests, trajectories, columns, weights."""
