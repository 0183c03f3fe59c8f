#include "textflag.h"

// func rawVfork(flags uintptr) (pid, err uintptr)
//
// As syscall.rawVforkSyscall. The return address is in a register already.
TEXT ·rawVfork(SB),NOSPLIT,$0-24
	MOVD	flags+0(FP), R0
	MOVD	$0, R1
	MOVD	$0, R2
	MOVD	$0, R3
	MOVD	$0, R4
	MOVD	$0, R5
	MOVD	$220, R8	// SYS_CLONE
	SVC
	CMN	$4095, R0
	BCC	ok
	MOVD	$-1, R4
	MOVD	R4, pid+8(FP)
	NEG	R0, R0
	MOVD	R0, err+16(FP)
	RET
ok:
	MOVD	R0, pid+8(FP)
	MOVD	ZR, err+16(FP)
	RET
