# Writes OUTPUT, TEMPLATE with the commit of ROOT: 12 digits, and -dirty where tracked files differ from it;
# empty where ROOT is in no repository. A file that would not change is not written. Run by every build, so
# that the commit is the one that is built: cmake -DROOT=… -DTEMPLATE=… -DOUTPUT=… -P Commit.cmake
function(git result)
  execute_process(COMMAND git --no-optional-locks -C ${ROOT} ${ARGN}
    RESULT_VARIABLE code OUTPUT_VARIABLE output OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${result} "${output}" PARENT_SCOPE)
  set(code "${code}" PARENT_SCOPE)
endfunction()

set(CAPSTAN_COMMIT "")
git(tracked ls-files --error-unmatch CMakeLists.txt)  # not: sources unpacked inside of another repository
if(code EQUAL 0)
  git(CAPSTAN_COMMIT rev-parse --short=12 HEAD)
  git(changes status --porcelain --untracked-files=no)
  if(CAPSTAN_COMMIT AND (changes OR NOT code EQUAL 0))
    string(APPEND CAPSTAN_COMMIT -dirty)
  endif()
endif()
configure_file(${TEMPLATE} ${OUTPUT} @ONLY)
