"""batches -> log-probabilities"""
