// A step by the megakernel whose drafts have branches. Knows nothing of sessions.
#pragma once
#include "../rope_append/head_rows.cuh"
#include "mega.h"

// As baton_megakernel; in each layer `branches` are begun behind the rows that they continue, before attention.
BATON_API int baton_megakernel_branches(const baton::Model* model, const baton::Step* step, const baton::Branches* branches, const void* layers,
                                        int32_t blocks, void* stream);
