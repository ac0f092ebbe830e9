"""Numbers of a running process, as Prometheus reads them."""
