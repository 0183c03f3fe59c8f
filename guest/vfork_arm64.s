#include "textflag.h"

// func rawVfork(args *cloneArgs) (pid, err uintptr)
//
// As syscall.rawVforkSyscall. The return address is in a register already.
TEXT ·rawVfork(SB),NOSPLIT,$0-24
	MOVD	args+0(FP), R0
	MOVD	$88, R1	// sizeof(struct clone_args)
	MOVD	$435, R8	// SYS_CLONE3
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
