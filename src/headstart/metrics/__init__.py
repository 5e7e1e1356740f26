"""Events and outputs -> the TTFT ledger and Prometheus metrics."""
