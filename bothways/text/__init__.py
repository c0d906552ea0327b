"""text <-> ids"""
