"""What a request must pass before its body is received: framing, key, type, length, circuit, capacity."""
