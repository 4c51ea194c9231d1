"""Engine cores in a Ray cluster: `starter` is the launcher's side, `places` the thread that speaks with Ray."""
