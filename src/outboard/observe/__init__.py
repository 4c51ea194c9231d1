"""What operators see: metrics, health, logs and traces. Receives events; changes nothing."""
