"""Excerpt of nvdisasm's output (`nvdisasm -c`), shortened, with consecutive addresses."""

NVDISASM = """
	.target	sm_100a

	.elftype	@"ET_EXEC"


//--------------------- .text.tile                --------------------------
	.section	.text.tile,"ax",@progbits
	.sectionflags	@"SHF_BARRIERS=3"
	.align	128
        .global         tile
        .type           tile,@function
        .size           tile,(.L_x_19 - tile)
        .other          tile,@"STO_CUDA_ENTRY STV_DEFAULT"
tile:
.text.tile:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/                   ISETP.GE.U32.AND P2, PT, R0, 0x20, PT ;
        /*0020*/               @P2 BRA `(.L_x_0) ;
.L_x_4:
        /*0030*/                   UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR5, UR5 ;
        /*0040*/              @!P0 BRA `(.L_x_4) ;
        /*0050*/                   CALL.REL.NOINC `($__internal_1_$__cuda_sm10x_tcgen05_guardrail_trap) ;
        /*0060*/              @UP0 UTMALDG.2D [UR12], [UR6], desc[UR8] ;
        /*0070*/                   UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR24], tmem[UR16], idesc[UR17], !UPT ;
        /*0080*/                   LDTM.x32 R4, tmem[UR13+0xa0] ;
        /*0090*/                   LDTM.16dp64bit.x2 R36, tmem[UR13+0xc0] ;
        /*00a0*/                   LDTM.16dp32bit_t0_t15 R40, tmem[UR13+0xc0] ;
        /*00b0*/                   LDTM R41, tmem[UR13] ;
        /*00c0*/                   LDG.E.128 R40, desc[UR20][R52.64+0x20] ;
        /*00d0*/                   LDG.E.U16.CONSTANT R40, desc[UR20][R52.64] ;
        /*00e0*/                   STL.64 [R1+0x8], R22 ;
        /*00f0*/                   LDL.LU R22, [R1+0x8] ;
        /*0100*/                   FMUL R5, R5.reuse, R6 ;
        /*0110*/              @!PT LDS RZ, [RZ] ;
        /*0120*/                   EXIT ;
.L_x_9:
        /*0130*/                   BRA `(.L_x_9);
        /*0140*/                   NOP;
        /*0150*/                   NOP;
.L_x_19:


//--------------------- .text.other               --------------------------
	.section	.text.other,"ax",@progbits
other:
.text.other:
        /*0000*/                   EXIT ;
        /*0010*/                   NOP ;


//--------------------- SYMBOLS --------------------------

	.type		.nv.reservedSmem.offset0,@object
	.size		.nv.reservedSmem.offset0,0x4
"""
