"""Page and slot allocation, and the pools whose memory other rooms read."""
