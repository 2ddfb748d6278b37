// Included before ggml-cpu.c on x86, and with MinGW's headers for Windows, where its threads need a change.
#pragma once

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#define SDRUN_YIELD() SwitchToThread()

// ggml uses this to tell Windows 11 not to park the cores of its threads. Headers of MinGW-w64 before version 11 declare the function
// and its number but not this structure (documented with SetThreadInformation).
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

// After every node of a graph, ggml's threads wait for each other by executing PAUSE in a loop. If another program needs the
// processor, that loop can keep out the very thread it waits for, until the system preempts it: milliseconds for each of hundreds
// of nodes. Here, one PAUSE in 256 yields to the system instead. On an idle machine this has no measurable cost.
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
