"""Dashboards, alerts and the settings of Prometheus and Grafana that show them."""
