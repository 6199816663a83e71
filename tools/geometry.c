/* SPDX-License-Identifier: Apache-2.0 */
#include "geometry.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "trace.h"

/*
 * From the models' published configurations. With MLA a token has one vector
 * of kv_lora_rank + qk_rope_head_dim elements a layer, shared by all heads, so
 * it is not divided among tensor-parallel ranks. Pages are those that the
 * usual attention kernels want: 16 tokens, 64 with MLA.
 */
static const struct model {
    const char *name;
    uint32_t layers;
    uint32_t kv_heads; /* 1 with MLA */
    uint32_t head_dim; /* elements of K, and of V, for one head and token */
    uint32_t element_bytes;
    uint32_t page_tokens;
    bool mla;
} models[] = {
    {"deepseek-r1", 61, 1, 576, 2, 64, true},
    {"deepseek-v2-lite", 27, 1, 576, 2, 64, true},
    {"deepseek-v3", 61, 1, 576, 2, 64, true},
    {"llama-3.1-405b", 126, 8, 128, 2, 16, false},
    {"llama-3.1-70b", 80, 8, 128, 2, 16, false},
    {"llama-3.1-8b", 32, 8, 128, 2, 16, false},
    {"llama-3.2-1b", 16, 8, 64, 2, 16, false},
    {"llama-3.2-3b", 28, 8, 128, 2, 16, false},
    {"mistral-7b", 32, 8, 128, 2, 16, false},
    {"qwen2.5-0.5b", 24, 2, 64, 2, 16, false},
    {"qwen2.5-32b", 64, 8, 128, 2, 16, false},
    {"qwen2.5-72b", 80, 8, 128, 2, 16, false},
    {"qwen2.5-7b", 28, 4, 128, 2, 16, false},
    {"qwen3-32b", 64, 8, 128, 2, 16, false},
    {"qwen3-8b", 36, 8, 128, 2, 16, false},
};

#define MODEL_COUNT (sizeof(models) / sizeof(models[0]))

const char *geometry_model_name(unsigned int index)
{
    return index < MODEL_COUNT ? models[index].name : NULL;
}

uint64_t geometry_piece_bytes(const struct geometry *geometry)
{
    return geometry->pages * geometry->page_bytes;
}

uint64_t geometry_slot_bytes(const struct geometry *geometry)
{
    return geometry->regions * geometry_piece_bytes(geometry);
}

uint64_t geometry_slot_pages(const struct geometry *geometry)
{
    return geometry->regions * geometry->pages;
}

void geometry_plain(uint64_t block_bytes, struct geometry *ret)
{
    *ret = (struct geometry){
        .regions = 1,
        .pages = 1,
        .page_bytes = block_bytes,
    };
}

/* Heads that one rank keeps; 0 when they cannot be divided so. More ranks than
 * heads keep a copy of one head each. */
static uint64_t heads_of_rank(const struct model *model, uint64_t tp)
{
    if (model->mla) {
        return 1;
    }
    if (tp <= model->kv_heads) {
        return model->kv_heads % tp == 0 ? model->kv_heads / tp : 0;
    }
    return tp % model->kv_heads == 0 ? 1 : 0;
}

bool geometry_model(const char *name, uint64_t page_tokens, uint64_t tp,
                    struct geometry *ret, char error[GEOMETRY_TEXT_MAX])
{
    const struct model *model = NULL;
    uint64_t heads;

    for (size_t i = 0; i < MODEL_COUNT; i++) {
        if (strcmp(models[i].name, name) == 0) {
            model = &models[i];
        }
    }
    if (model == NULL) {
        (void)snprintf(error, GEOMETRY_TEXT_MAX,
                       "there is no model \"%s\" here; 'kvt help replay' has "
                       "the list, --block-bytes takes any size",
                       name);
        return false;
    }
    heads = heads_of_rank(model, tp);
    if (heads == 0) {
        (void)snprintf(error, GEOMETRY_TEXT_MAX,
                       "the %u KV heads of %s cannot be divided among %llu "
                       "ranks: --tp must divide them or be a multiple of them",
                       model->kv_heads, name, (unsigned long long)tp);
        return false;
    }
    if (page_tokens == 0) {
        page_tokens = model->page_tokens;
    }
    if (TRACE_BLOCK_TOKENS % page_tokens != 0) {
        (void)snprintf(error, GEOMETRY_TEXT_MAX,
                       "pages of %llu tokens do not fill a hash block of %u "
                       "tokens: --page-tokens must divide it",
                       (unsigned long long)page_tokens, TRACE_BLOCK_TOKENS);
        return false;
    }
    *ret = (struct geometry){
        .regions = model->mla ? model->layers : 2 * (uint64_t)model->layers,
        .pages = TRACE_BLOCK_TOKENS / page_tokens,
        .page_bytes = page_tokens * heads * model->head_dim *
                      model->element_bytes,
        .page_tokens = page_tokens,
    };
    return true;
}
