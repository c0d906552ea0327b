"""batches -> weights"""
