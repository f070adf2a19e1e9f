"""Policies that decide what a full cache gives up."""
