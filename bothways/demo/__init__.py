"""A small practical task, generated, that shows what two directions are good for"""
