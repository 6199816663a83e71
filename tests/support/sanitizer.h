/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which sanitizer this was built with, or whether it was built to run under
 * valgrind, for tests that count memory (ASan keeps what was freed) or do less
 * where everything is slow.
 */
#ifndef KVT_TEST_SANITIZER_H
#define KVT_TEST_SANITIZER_H

#include <stdbool.h>

#ifndef __has_feature
#define __has_feature(name) 0
#endif

#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define BUILT_WITH_TSAN true
#else
#define BUILT_WITH_TSAN false
#endif

#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#define BUILT_WITH_ASAN true
#else
#define BUILT_WITH_ASAN false
#endif

#ifdef KVT_VALGRIND
#define BUILT_FOR_VALGRIND true
#else
#define BUILT_FOR_VALGRIND false
#endif

#endif /* KVT_TEST_SANITIZER_H */
