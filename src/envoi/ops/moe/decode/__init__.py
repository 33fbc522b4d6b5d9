"""MoE layers for few tokens (decode): they take topk_ids, and permute is a part of their first launch."""
