from deepspeed.compile.passes import sp_compile
