"""ids -> batches"""
