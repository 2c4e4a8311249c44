"""Small versions of language models that people have, with random weights."""

from typing import Any

from zoo_builders import Architecture, hugging_face, tokens

__all__ = ["BERT", "ENCODER_DECODER", "GROUPED", "LANGUAGE", "SIZES"]

TOKENS: dict[str, Any] = {
    "vocab_size": 50,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
BERT = TOKENS | SIZES
GROUPED: dict[str, Any] = BERT | {"num_key_value_heads": 2}
WIDE_HEADS: dict[str, Any] = GROUPED | {"head_dim": 8}
GPT: dict[str, Any] = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4}
ENCODER_DECODER: dict[str, Any] = TOKENS | {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 0,
}
LANGUAGE = {
    "bert": Architecture(
        hugging_face("BertForSequenceClassification", **BERT),
        tokens(),
        feed_forward=3,
        heads=2,
        resumes=True,
    ),
    "roberta": Architecture(
        hugging_face("RobertaForMaskedLM", **BERT), tokens(), feed_forward=2, heads=2
    ),
    "distilbert": Architecture(
        hugging_face(
            "DistilBertForSequenceClassification",
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=64,
            **TOKENS,
        ),
        tokens(),
        feed_forward=3,
        heads=2,
    ),
    "albert": Architecture(
        hugging_face("AlbertForSequenceClassification", embedding_size=16, **BERT),
        tokens(),
        feed_forward=1,
    ),
    "electra": Architecture(
        hugging_face("ElectraForSequenceClassification", embedding_size=16, **BERT),
        tokens(),
        feed_forward=3,
        heads=2,
    ),
    "deberta_v2": Architecture(
        hugging_face(
            "DebertaV2ForSequenceClassification",
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=8,
            norm_rel_ebd="layer_norm",
            **BERT,
        ),
        tokens(),
        feed_forward=3,
        heads=2,
    ),
    "gpt2": Architecture(
        hugging_face("GPT2LMHeadModel", **GPT),
        tokens(),
        feed_forward=2,
        heads=2,
        generates=True,
        resumes=True,
    ),
    "gpt_neo": Architecture(
        hugging_face(
            "GPTNeoForCausalLM",
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            intermediate_size=64,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=32,
            **TOKENS,
        ),
        tokens(),
        feed_forward=2,
        heads=2,
    ),
    "gpt_neox": Architecture(
        hugging_face("GPTNeoXForCausalLM", **BERT),
        tokens(),
        feed_forward=2,
        heads=2,
        generates=True,
    ),
    "gptj": Architecture(
        hugging_face("GPTJForCausalLM", rotary_dim=4, **GPT), tokens(), feed_forward=2, heads=2
    ),
    "opt": Architecture(
        hugging_face(
            "OPTForCausalLM",
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            word_embed_proj_dim=32,
            max_position_embeddings=32,
            **TOKENS,
        ),
        tokens(),
        feed_forward=2,
        heads=2,
        generates=True,
    ),
    # Closed units stay: the slope of a head's bias by position is computed from its number.
    "bloom": Architecture(
        hugging_face("BloomForCausalLM", hidden_size=32, n_layer=2, n_head=4, **TOKENS),
        tokens(),
        feed_forward=2,
        heads=2,
        notes=2,
        generates=True,
    ),
    # Nothing: its linear maps have a class of their own.
    "falcon": Architecture(hugging_face("FalconForCausalLM", **BERT), tokens()),
    "llama": Architecture(
        hugging_face("LlamaForCausalLM", **GROUPED),
        tokens(),
        feed_forward=2,
        heads=2,
        generates=True,
        resumes=True,
    ),
    "mistral": Architecture(
        hugging_face("MistralForCausalLM", **GROUPED), tokens(), feed_forward=2, heads=2
    ),
    "qwen2": Architecture(
        hugging_face("Qwen2ForCausalLM", **GROUPED),
        tokens(),
        feed_forward=2,
        heads=2,
        generates=True,
    ),
    "qwen3": Architecture(
        hugging_face("Qwen3ForCausalLM", **WIDE_HEADS), tokens(), feed_forward=2, heads=2
    ),
    "gemma": Architecture(
        hugging_face("GemmaForCausalLM", **WIDE_HEADS), tokens(), feed_forward=2, heads=2
    ),
    "gemma2": Architecture(
        hugging_face("Gemma2ForCausalLM", **WIDE_HEADS), tokens(), feed_forward=2, heads=2
    ),
    "phi": Architecture(hugging_face("PhiForCausalLM", **BERT), tokens(), feed_forward=2, heads=2),
    # Closed units stay: it splits by the number of heads in the config, not of the layer.
    "phi3": Architecture(
        hugging_face("Phi3ForCausalLM", **GROUPED), tokens(), feed_forward=2, heads=2, notes=2
    ),
    "stablelm": Architecture(
        hugging_face("StableLmForCausalLM", **GROUPED), tokens(), feed_forward=2, heads=2
    ),
    "mixtral": Architecture(
        hugging_face(
            "MixtralForCausalLM", num_local_experts=4, experts_implementation="eager", **GROUPED
        ),
        tokens(),
        heads=2,
    ),
    "olmo2": Architecture(hugging_face("Olmo2ForCausalLM", **GROUPED), tokens(), feed_forward=2),
    "cohere": Architecture(
        hugging_face("CohereForCausalLM", **GROUPED), tokens(), feed_forward=2, heads=2
    ),
    "starcoder2": Architecture(
        hugging_face("Starcoder2ForCausalLM", **GROUPED), tokens(), feed_forward=2, heads=2
    ),
    # Closed units stay: the slope of a head's bias by position is computed from its number.
    "mpt": Architecture(
        hugging_face(
            "MptForCausalLM", d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, **TOKENS
        ),
        tokens(),
        feed_forward=2,
        heads=2,
        notes=2,
    ),
    # Nothing: a scan, steered by some units, mixes what all others become.
    "mamba": Architecture(
        hugging_face(
            "MambaForCausalLM", hidden_size=32, num_hidden_layers=2, state_size=4, **TOKENS
        ),
        tokens(),
    ),
    # Closed units stay: one tensor, of all heads, goes to the cross attention of all layers.
    "t5": Architecture(
        hugging_face(
            "T5ForConditionalGeneration",
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            **TOKENS,
        ),
        tokens("decoder_input_ids"),
        feed_forward=4,
        heads=2,
        notes=2,
        generates=True,
        resumes=True,
    ),
    "bart": Architecture(
        hugging_face("BartForConditionalGeneration", **ENCODER_DECODER),
        tokens("decoder_input_ids"),
        feed_forward=2,
        heads=3,
        generates=True,
    ),
    "marian": Architecture(
        hugging_face("MarianMTModel", **ENCODER_DECODER),
        tokens("decoder_input_ids"),
        feed_forward=2,
        heads=3,
    ),
    "pegasus": Architecture(
        hugging_face("PegasusForConditionalGeneration", **ENCODER_DECODER),
        tokens("decoder_input_ids"),
        feed_forward=2,
        heads=3,
    ),
}
