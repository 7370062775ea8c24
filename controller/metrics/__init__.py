"""Every Prometheus name of llmgw: `page.render` makes `/metrics`."""
