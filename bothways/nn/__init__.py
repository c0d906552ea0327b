"""Pieces shared by models."""
