"""tests/parity"""
