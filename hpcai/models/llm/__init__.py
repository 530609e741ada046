"""Language models: text to tokens, decoders of tokens, tokens to text."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".advantages": ["KLController", "gae", "group_advantages", "kl_rewards", "leave_one_out", "moments", "whiten"],
        ".alignment": [
            "PreferenceBatch", "RolloutBatch", "actor_critic_loss", "answer_log_probs", "answer_rewards", "policy_loss",
            "preference_loss", "reward_loss", "token_log_probs", "token_values", "value_loss",
        ],
        ".alignment_config": ["KLConfig", "PolicyConfig", "PreferenceConfig", "RewardConfig", "RolloutConfig"],
        ".config": ["AxesConfig", "EngineConfig", "LLMConfig", "LoRAConfig", "SamplingConfig"],
        ".critic": ["ActorCritic", "Critic"],
        ".engine": ["Engine", "Request"],
        ".generation": ["complete", "generate"],
        ".likelihood": ["greedy_log_likelihoods", "likelihoods", "log_likelihoods"],
        ".load": ["load_weights", "load_deferred", "save_folder"],
        ".lora": ["adapt", "load_adapter", "merge", "save_adapter"],
        ".model": ["LLM"],
        ".objective": ["Batch", "entropies", "loss", "score"],
        ".parallel": ["build_pipeline", "parallelize"],
        ".preferences": ["Pair", "Preferences"],
        ".rewards": ["Rewards"],
        ".rollouts": ["Network", "Prompt", "Rollouts"],
        ".text": ["Text"],
        ".tokenizer": ["DecodeStream", "Tokenizer"],
    },
)
