// Included before ggml-cpu.c where its threads need something from us: on x86, and where Windows's headers are MinGW's.
#pragma once

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#define SDRUN_YIELD() SwitchToThread()

// By which ggml tells Windows 11 not to park the cores its threads are on. Headers of MinGW-w64 before version 11 have the
// function and its number, but not what it is given (documented with SetThreadInformation).
#ifndef THREAD_POWER_THROTTLING_CURRENT_VERSION
#define THREAD_POWER_THROTTLING_CURRENT_VERSION 1
#define THREAD_POWER_THROTTLING_EXECUTION_SPEED 1
typedef struct {
    ULONG Version;
    ULONG ControlMask;
    ULONG StateMask;
} THREAD_POWER_THROTTLING_STATE;
#endif
#else
#include <sched.h>
#define SDRUN_YIELD() sched_yield()
#endif

#if defined(__x86_64__)
#include <immintrin.h>

// ggml's threads wait for each other, after every node of a graph, by executing PAUSE in a loop. Where another
// program wants the processor that loop keeps it from the very thread it waits for, until the system takes the
// processor away: milliseconds for each of hundreds of nodes. Here one PAUSE in 256 becomes an offer to the system
// to run somebody else; on an idle machine that costs nothing that could be measured.
static inline void sdrun_relax(void) {
    static _Thread_local unsigned spins;
    if (++spins % 256 == 0) {
        SDRUN_YIELD();
    } else {
        _mm_pause();
    }
}

#define _mm_pause() sdrun_relax()
#endif
